"""Integrations with other packages, one per module. No other module of fscoord imports an integration."""
