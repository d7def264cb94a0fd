import java.io.IOException;
import java.nio.charset.StandardCharsets;
import java.util.concurrent.Executors;
import java.util.concurrent.ScheduledExecutorService;
import java.util.concurrent.TimeUnit;
import org.apache.bookkeeper.auth.AuthCallbacks.GenericCallback;
import org.apache.bookkeeper.auth.AuthToken;
import org.apache.bookkeeper.auth.BookieAuthProvider;
import org.apache.bookkeeper.auth.ClientAuthProvider;
import org.apache.bookkeeper.client.BKException.Code;
import org.apache.bookkeeper.conf.ClientConfiguration;
import org.apache.bookkeeper.conf.ServerConfiguration;
import org.apache.bookkeeper.proto.BookieConnectionPeer;
import org.apache.bookkeeper.proto.ClientConnectionPeer;

/**
 * Bindery's token authentication for Apache's client and bookie: one message with the token, one empty response.
 *
 * <p>The token is the property `interopToken` of the configuration. The plugin has Bindery's default name. With
 * `interopTokenAfterTls`, the client sends the token only after the bookie has accepted START_TLS.
 *
 * <p>That avoids a race of Apache's v2 client. It writes its first AUTH when the channel becomes active, and START_TLS
 * from a listener that it adds after the connect, so that AUTH is sometimes the first of both. The response to AUTH is
 * then the first that the client reads: it takes the connection for one without v3 messages, cannot read the response
 * to START_TLS, and ends. Apache's bookie ends the connection even before that. It also requires that the token arrives
 * before the end of the handshake, so that the setting cannot be used with it. See RequestDecoder and ResponseDecoder
 * of BookieProtoEncoding, and BookieRequestProcessor.processStartTLSRequestV3, of BookKeeper 4.17.
 */
public class TokenAuth {
    static final String PLUGIN = "bindery";
    static final String PROPERTY = "interopToken";
    static final String AFTER_TLS = "interopTokenAfterTls";
    static final long CHECK_MS = 2;

    private static final ScheduledExecutorService CHECKS = Executors.newSingleThreadScheduledExecutor(run -> {
        Thread thread = new Thread(run, "token-after-tls");
        thread.setDaemon(true);
        return thread;
    });

    /** The class for the setting `clientAuthProviderFactoryClass`. */
    public static class Client implements ClientAuthProvider.Factory {
        private byte[] token;
        private boolean isAfterTls;

        @Override
        public void init(ClientConfiguration conf) throws IOException {
            token = conf.getString(PROPERTY).getBytes(StandardCharsets.UTF_8);
            isAfterTls = conf.getBoolean(AFTER_TLS, false);
        }

        @Override
        public ClientAuthProvider newProvider(ClientConnectionPeer peer, GenericCallback<Void> complete) {
            return new ClientAuthProvider() {
                private volatile boolean isClosed;

                @Override
                public void init(GenericCallback<AuthToken> send) {
                    if (!isAfterTls || peer.isSecure()) {
                        send.operationComplete(Code.OK, AuthToken.wrap(token));
                    } else if (!isClosed) {
                        CHECKS.schedule(() -> init(send), CHECK_MS, TimeUnit.MILLISECONDS);
                    }
                }

                @Override
                public void close() {
                    isClosed = true;
                }

                @Override
                public void process(AuthToken answer, GenericCallback<AuthToken> send) {
                    complete.operationComplete(Code.OK, null);
                }
            };
        }

        @Override
        public String getPluginName() {
            return PLUGIN;
        }
    }

    /** The class for the setting `bookieAuthProviderFactoryClass`. */
    public static class Bookie implements BookieAuthProvider.Factory {
        private String token;

        @Override
        public void init(ServerConfiguration conf) throws IOException {
            token = conf.getString(PROPERTY);
        }

        @Override
        public BookieAuthProvider newProvider(BookieConnectionPeer peer, GenericCallback<Void> complete) {
            return (presented, send) -> {
                if (token.equals(new String(presented.getData(), StandardCharsets.UTF_8))) {
                    send.operationComplete(Code.OK, AuthToken.NULL);
                    complete.operationComplete(Code.OK, null);
                } else {
                    send.operationComplete(Code.UnauthorizedAccessException, null);
                }
            };
        }

        @Override
        public String getPluginName() {
            return PLUGIN;
        }
    }
}
