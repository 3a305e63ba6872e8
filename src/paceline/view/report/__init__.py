"""The report: one HTML file with charts."""
