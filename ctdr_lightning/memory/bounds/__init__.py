"""What no plan beats: lower bounds of time and memory."""
