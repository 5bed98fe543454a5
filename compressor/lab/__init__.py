"""What reads artifacts and reports: inspect, bench, compare, explain, roofline."""
