"""Documents → terminal, Markdown, CSV and page. No torch."""
