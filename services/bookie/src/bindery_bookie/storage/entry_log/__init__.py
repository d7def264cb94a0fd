"""Entry logs: file format, appending, scanning, and the manifest of logs."""
