"""The callback's work inside a running Trainer, by public interfaces only."""
