"""Bridges to other packages, one per module; nothing else imports them."""
