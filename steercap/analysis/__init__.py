"""What can be computed from captured rows alone."""
