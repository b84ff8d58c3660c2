"""The report of a run: one HTML page that holds everything, and findings in words."""
