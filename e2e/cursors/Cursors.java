import java.util.ArrayList;
import java.util.List;
import org.apache.bookkeeper.conf.ClientConfiguration;
import org.apache.bookkeeper.mledger.Entry;
import org.apache.bookkeeper.mledger.ManagedCursor;
import org.apache.bookkeeper.mledger.ManagedLedger;
import org.apache.bookkeeper.mledger.ManagedLedgerConfig;
import org.apache.bookkeeper.mledger.Position;
import org.apache.bookkeeper.mledger.PositionFactory;
import org.apache.bookkeeper.mledger.impl.ManagedLedgerFactoryImpl;
import org.apache.pulsar.metadata.api.MetadataStoreConfig;
import org.apache.pulsar.metadata.api.extended.MetadataStoreExtended;

/**
 * Opens a topic as a broker of Pulsar does, and prints what its cursor would deliver.
 *
 * <p>Arguments: ZooKeeper (host:port), topic, cursor, and positions (ledger:entry) to acknowledge. Prints one line
 * "mark-delete L:E", one line "deliver L:E" for each entry that is not acknowledged, and "closed" after a clean close.
 * With the last argument "kill", the process ends without closing anything.
 */
public class Cursors {
    public static void main(String[] args) throws Exception {
        MetadataStoreExtended store =
                MetadataStoreExtended.create("zk:" + args[0], MetadataStoreConfig.builder().build());
        ClientConfiguration client = new ClientConfiguration();
        client.setMetadataServiceUri("zk+hierarchical://" + args[0] + "/ledgers");
        ManagedLedgerFactoryImpl factory = new ManagedLedgerFactoryImpl(store, client);
        ManagedLedgerConfig config = new ManagedLedgerConfig();
        config.setEnsembleSize(3).setWriteQuorumSize(3).setAckQuorumSize(2);
        config.setThrottleMarkDelete(0);
        ManagedLedger topic = factory.open(args[1], config);
        ManagedCursor cursor = topic.openCursor(args[2]);
        System.out.println("mark-delete " + text(cursor.getMarkDeletedPosition()));
        while (cursor.hasMoreEntries()) {
            List<Entry> entries = cursor.readEntries(1000);
            for (Entry entry : entries) {
                System.out.println("deliver " + text(entry.getPosition()));
                entry.release();
            }
        }
        boolean kill = false;
        List<Position> positions = new ArrayList<>();
        for (int i = 3; i < args.length; i++) {
            if (args[i].equals("kill")) {
                kill = true;
            } else {
                String[] parts = args[i].split(":");
                positions.add(PositionFactory.create(Long.parseLong(parts[0]), Long.parseLong(parts[1])));
            }
        }
        if (!positions.isEmpty()) {
            cursor.delete(positions);
        }
        if (kill) {
            System.out.println("killed");
            System.out.flush();
            Runtime.getRuntime().halt(0);
        }
        topic.close();
        factory.shutdown();
        store.close();
        System.out.println("closed");
        System.out.flush();
        Runtime.getRuntime().halt(0);
    }

    private static String text(Position position) {
        return position.getLedgerId() + ":" + position.getEntryId();
    }
}
