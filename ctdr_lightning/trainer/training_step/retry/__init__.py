"""A step that failed, put back and run again."""
