"""From stored results to tables, predictions, verdicts and comparisons. No torch."""
