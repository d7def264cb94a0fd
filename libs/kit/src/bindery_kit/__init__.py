"""Code that all services share: settings, logs, metrics, health, errors as HTTP."""
