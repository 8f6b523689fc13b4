"""What the callback does to a running Trainer, by public interfaces only."""
