"""Dense products in one order of sums, whatever their number of rows."""
