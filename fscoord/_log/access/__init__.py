"""How bytes are read and written on each kind of mount."""
