"""What the server tells of itself: metrics, a line and a timeline per request, traces."""
