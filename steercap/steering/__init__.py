"""What a user asks to change, checked against the model and compiled."""
