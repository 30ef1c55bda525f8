"""``python -m service.cli`` is ``gearshift``."""

from service.cli import main

main()
