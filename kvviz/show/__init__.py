"""What people see: byte maps (text, picture, figure, interactive), the page of an audit, and explorers."""
