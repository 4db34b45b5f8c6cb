"""What people see: byte maps, the page of an audit, figures and explorers."""
