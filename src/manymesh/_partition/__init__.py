"""From the flat program to fragments on submeshes: place, regroup sums, cluster, number the stages."""
