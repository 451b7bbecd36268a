"""A report of the ledger as one HTML file: what is shown of which runs, figures, and the page itself."""
