"""``cast``: half precision, with float32 islands where it would not do."""
