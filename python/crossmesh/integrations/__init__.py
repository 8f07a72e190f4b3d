"""Weight sync inside other systems."""
