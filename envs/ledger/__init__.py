"""The back office of a small bank on a real SQLite database."""
