"""Process-wide machinery: the replaceable operating system, signals, events, imports."""
