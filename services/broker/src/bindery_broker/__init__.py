"""The broker: topics, subscriptions and the HTTP data API over ledgers."""
