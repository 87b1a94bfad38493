"""Faces for users of other tools."""
