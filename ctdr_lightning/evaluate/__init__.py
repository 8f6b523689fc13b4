"""What a step really takes, measured."""
