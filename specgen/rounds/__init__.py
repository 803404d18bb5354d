"""What a round is, and the numbers that follow from rounds. No torch."""
