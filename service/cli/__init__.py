"""The command. ``gearshift worker`` runs a worker; the rest is what a person needs to try it and to operate it."""

from service.cli.main import main

__all__ = ["main"]
