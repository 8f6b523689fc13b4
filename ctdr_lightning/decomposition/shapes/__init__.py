"""Description of a dense layer: its kind and its geometry."""
