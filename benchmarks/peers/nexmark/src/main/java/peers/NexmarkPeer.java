package peers;

import java.lang.management.ManagementFactory;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.List;
import org.apache.flink.configuration.Configuration;
import org.apache.flink.table.api.DataTypes;
import org.apache.flink.table.api.EnvironmentSettings;
import org.apache.flink.table.api.Schema;
import org.apache.flink.table.api.Table;
import org.apache.flink.table.api.TableDescriptor;
import org.apache.flink.table.api.TableEnvironment;
import org.apache.flink.table.api.TableResult;
import org.apache.flink.table.catalog.Column;
import org.apache.flink.table.types.DataType;
import org.apache.flink.table.types.logical.LogicalTypeRoot;

/**
 * Flink SQL with a sink that drops everything: NexmarkPeer DDL SETTINGS RUNS LIMIT QUERY... . DDL has statements that end with
 * a semicolon, SETTINGS a setting a line, a QUERY file one query. Each query has its share of LIMIT seconds: two runs at least,
 * and RUNS at most. Prints the seconds of each run: query, then the time from the job's start to its end, without planning, and
 * the CPU seconds that the process took meanwhile, with planning.
 */
public class NexmarkPeer {
    public static void main(String[] arguments) throws Exception {
        int runs = Integer.parseInt(arguments[2]);
        double limit = Double.parseDouble(arguments[3]);
        long begun = System.nanoTime();
        for (int at = 4; at < arguments.length; at++) {
            Path query = Path.of(arguments[at]);
            double until = limit * (at - 3) / (arguments.length - 4);
            for (int run = 0; run < 2 || (run < runs && (System.nanoTime() - begun) / 1e9 < until); run++) {
                try {
                    long before = cpuNanos();
                    double seconds = seconds(arguments, Files.readString(query));
                    System.out.println("seconds: " + query.getFileName() + " " + seconds + " " + (cpuNanos() - before) / 1e9);
                } catch (Exception failure) {
                    Throwable cause = failure;
                    while (cause.getCause() != null) {
                        cause = cause.getCause();
                    }
                    System.out.println("failed: " + query.getFileName() + " " + cause.toString().replace('\n', ' '));
                    break;
                }
            }
        }
        System.exit(0);
    }

    /** The CPU time of this process so far: planning and compiling of Java's bytes included. */
    private static long cpuNanos() {
        return ((com.sun.management.OperatingSystemMXBean) ManagementFactory.getOperatingSystemMXBean()).getProcessCpuTime();
    }

    private static double seconds(String[] arguments, String query) throws Exception {
        Configuration settings = new Configuration();
        for (String line : Files.readAllLines(Path.of(arguments[1]))) {
            int end = line.indexOf(": ");
            settings.setString(line.substring(0, end), line.substring(end + 2));
        }
        TableEnvironment env = TableEnvironment.create(EnvironmentSettings.newInstance().inStreamingMode().withConfiguration(settings).build());
        for (String statement : Files.readString(Path.of(arguments[0])).split(";")) {
            if (!statement.isBlank()) {
                env.executeSql(statement);
            }
        }
        Table answer = env.sqlQuery(query);
        env.createTemporaryTable("sink", TableDescriptor.forConnector("blackhole").schema(plain(answer.getResolvedSchema().getColumns())).build());
        TableResult result = answer.executeInsert("sink");
        return result.getJobClient().orElseThrow().getJobExecutionResult().get().getNetRuntime() / 1000.0;
    }

    /** The columns of an answer, times without a meaning for windows. */
    private static Schema plain(List<Column> columns) {
        Schema.Builder schema = Schema.newBuilder();
        for (Column column : columns) {
            DataType type = column.getDataType();
            LogicalTypeRoot root = type.getLogicalType().getTypeRoot();
            if (root == LogicalTypeRoot.TIMESTAMP_WITHOUT_TIME_ZONE) {
                type = DataTypes.TIMESTAMP(3);
            } else if (root == LogicalTypeRoot.TIMESTAMP_WITH_LOCAL_TIME_ZONE) {
                type = DataTypes.TIMESTAMP_LTZ(3);
            }
            schema.column(column.getName(), type);
        }
        return schema.build();
    }
}
