"""Programs that print how we compare with peers measured in the same run."""
