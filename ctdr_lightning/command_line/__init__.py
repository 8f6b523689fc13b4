"""From the words of a command line to a model, a batch and a step."""
