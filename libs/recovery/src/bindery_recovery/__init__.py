"""Healing: finds what lacks copies, makes new ones, and moves what a bookie that leaves holds."""
