"""What people see: byte maps and their renderings. Imports ``kvviz.memory`` alone."""
