"""Bodies that the stages share. Nothing here is public."""
