"""Operations on partitioned topics: any broker runs them, by requests to the owners of the partitions."""
