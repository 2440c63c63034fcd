"""How anything waits."""
