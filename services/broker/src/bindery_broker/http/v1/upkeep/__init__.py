"""Operations on a topic's schema and on its compaction."""
