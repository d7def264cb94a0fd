// Sends the messages of record.py with Pulsar's Java client. Arguments: the URLs of its two brokers.
import java.io.ByteArrayOutputStream;
import java.nio.charset.StandardCharsets;
import java.security.KeyPairGenerator;
import java.security.MessageDigest;
import java.util.Base64;
import java.util.Map;
import java.util.concurrent.TimeUnit;
import org.apache.pulsar.client.api.CompressionType;
import org.apache.pulsar.client.api.CryptoKeyReader;
import org.apache.pulsar.client.api.EncryptionKeyInfo;
import org.apache.pulsar.client.api.Producer;
import org.apache.pulsar.client.api.ProducerBuilder;
import org.apache.pulsar.client.api.PulsarClient;

public class Record {
    static byte[] text() {
        StringBuilder text = new StringBuilder();
        for (int n = 199; n > 0; n--) {
            text.append(n).append(" bottles of beer on the wall, ");
        }
        return text.toString().getBytes(StandardCharsets.US_ASCII);
    }

    static byte[] noise() throws Exception {
        ByteArrayOutputStream out = new ByteArrayOutputStream();
        for (int n = 0; n < 120; n++) {
            out.write(MessageDigest.getInstance("SHA-256").digest(Integer.toString(n).getBytes()));
        }
        out.write(new byte[1000]);
        return out.toByteArray();
    }

    static ProducerBuilder<byte[]> producer(PulsarClient client, String topic, CompressionType type, boolean batching) {
        return client.newProducer().topic(topic).producerName("p-1").compressionType(type).enableBatching(batching)
                .batchingMaxPublishDelay(10, TimeUnit.SECONDS);
    }

    public static void main(String[] urls) throws Exception {
        byte[] text = text();
        PulsarClient client = PulsarClient.builder().serviceUrl(urls[0]).build();
        for (CompressionType type : CompressionType.values()) {
            String name = type.name().toLowerCase();
            for (String topic : new String[] {"single", "empty"}) {
                producer(client, topic + "_" + name, type, false).create().newMessage().key("k").property("red", "TAGS")
                        .value(topic.equals("empty") ? new byte[0] : text).send();
            }
            Producer<byte[]> batch = producer(client, "batch_" + name, type, true).create();
            byte[][] parts = {text, {}, "last".getBytes()};
            for (int n = 0; n < parts.length; n++) {
                batch.newMessage().key("k").orderingKey("o".getBytes()).property("n", "" + n).property("red", "TAGS")
                        .value(parts[n]).sendAsync();
            }
            batch.flush();
        }
        KeyPairGenerator pairs = KeyPairGenerator.getInstance("RSA");
        pairs.initialize(2048);
        byte[] key = ("-----BEGIN PUBLIC KEY-----\n"
                + Base64.getMimeEncoder().encodeToString(pairs.generateKeyPair().getPublic().getEncoded())
                + "\n-----END PUBLIC KEY-----\n").getBytes();
        CryptoKeyReader keys = new CryptoKeyReader() {
            public EncryptionKeyInfo getPublicKey(String name, Map<String, String> metadata) {
                return new EncryptionKeyInfo(key, Map.of("version", "1"));
            }

            public EncryptionKeyInfo getPrivateKey(String name, Map<String, String> metadata) {
                return null;
            }
        };
        for (boolean batching : new boolean[] {false, true}) {
            Producer<byte[]> producer = producer(client, batching ? "encrypted_batch" : "encrypted_single",
                    CompressionType.LZ4, batching).addEncryptionKey("key-1").cryptoKeyReader(keys).create();
            for (int n = 0; n < (batching ? 3 : 1); n++) {
                producer.newMessage().key("k").property("red", "TAGS").value(text).sendAsync();
            }
            producer.flush();
        }
        client.close();
        PulsarClient chunking = PulsarClient.builder().serviceUrl(urls[1]).build();
        for (CompressionType type : new CompressionType[] {CompressionType.NONE, CompressionType.LZ4}) {
            producer(chunking, "chunk_" + type.name().toLowerCase(), type, false).enableChunking(true).create()
                    .newMessage().key("k").property("red", "TAGS").value(noise()).send();
        }
        chunking.close();
    }
}
