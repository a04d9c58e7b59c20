import sys

from nbtrain.engine.app import run

run(sys.argv[1:])
