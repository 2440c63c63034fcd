"""Integrations with other packages, one per module. No other module imports them."""
