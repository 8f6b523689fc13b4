"""Plans for compiled models: the joint graph of forward and backward, parted as a plan says."""
