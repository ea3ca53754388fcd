"""What the engine does at this moment, for those who watch."""
