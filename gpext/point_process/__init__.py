"""Point processes."""
