"""Pure arithmetic on layouts: pipeline schedules as data, and the time that they take. Imports no torch."""
