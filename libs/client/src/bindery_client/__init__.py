"""The asyncio ledger client: create, add, read, tail, recover and delete ledgers."""
