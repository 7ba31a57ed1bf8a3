"""Requests on the client side: from a call's arguments to texts and capture handles."""
