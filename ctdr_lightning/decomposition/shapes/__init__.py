"""What a dense layer is: its kind and its geometry."""
