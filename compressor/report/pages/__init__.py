"""What commands print for people, apart from reports and plans."""
