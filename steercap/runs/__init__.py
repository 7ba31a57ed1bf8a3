"""What a long run needs: to know its model again, to go on where it was, to say how far it is."""
