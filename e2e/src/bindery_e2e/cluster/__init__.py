"""The cluster under test: kubectl, helm, images, audits."""
